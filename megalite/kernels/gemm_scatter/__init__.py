"""Multiply and sum over ranks into each rank's rows, the transfer of what is ready under the product of the rest."""
