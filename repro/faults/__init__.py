"""The fault lab: everything that can happen to a training run, done to real runs of this code in temporary checkouts.

`faults` has the faults, in groups; `lab` has the checkouts that they are done in and what came of each.
"""
