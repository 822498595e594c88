"""Multiply and sum over ranks into all rows on all ranks, the transfer under the product."""
