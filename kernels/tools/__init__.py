"""Proof and measurement of the kernels: `check` (are they right?), `bench` (are they fast?), `resources` (what the compiler made)."""
