"""Costs of a model: parameters and multiply-adds (`flops`, `adapted`), and time and memory on a device (`speed`,
`op_rate`); rows of many models with their records, tables and figures (`complexity`, `efficiency`, `kernels`, `forms`).
"""
