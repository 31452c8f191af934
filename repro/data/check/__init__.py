"""`repro data check`: checks before a long run that a data set is what it should be."""
