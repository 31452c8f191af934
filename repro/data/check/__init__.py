"""`repro data check`: is a data set what it should be, before days are spent on it?"""
