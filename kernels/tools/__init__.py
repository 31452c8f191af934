"""Tools for the kernels: `check` (are they right?), `bench` (are they fast?)."""
