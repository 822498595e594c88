"""Gather the ranks' rows and multiply them, the product of what is here under the arrival of the rest."""
