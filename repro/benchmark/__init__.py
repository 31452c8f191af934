"""Counts and speeds of models as records: which rows are wanted, measuring them one by one, and writing tables and
figures.
"""
