"""Costs of models: parameters and multiply-adds (`flops`, `adapted`), time and memory on a device (`speed`, `op_rate`).

`complexity`, `efficiency`, `kernels` and `forms` measure many rows, and write their records, tables and figures.
"""
