"""Tools for the kernels: `check` (are they right?), `bench` (are they fast?), `resources` (what does the compiler make
of them?).
"""
