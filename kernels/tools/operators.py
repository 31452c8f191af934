"""The operators of the tools and the tests, each by its `cases.Cases`."""

from .. import triton_launch
from . import around_cases, bi_wkv_cases, ms_deform_attn_cases, selective_scan_cases, ttt_linear_cases
from .cases import Cases

_ALL = ttt_linear_cases, selective_scan_cases, bi_wkv_cases, ms_deform_attn_cases
OPERATORS: dict[str, Cases] = {cases.NAME: cases for cases in (*(module.CASES for module in _ALL), *around_cases.CASES)}
INTERPRETED = triton_launch.INTERPRETED  # whether Triton runs all kernels in its interpreter
