"""Checks of a data set before a long run, for `repro data check`."""
