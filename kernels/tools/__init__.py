"""Tools for the kernels: `check` compares them with the references, `bench` times them."""
