"""FP8 numerics: formats, casts, GEMMs and scale state. Knows no process groups and no models."""

from megafp8.numerics.device_gemm import fp8_hardware, recipe_hardware, writes_fp32
from megafp8.numerics.formats import E4M3, E5M2, Fp8Format
from megafp8.numerics.gemm import check_gemm_dims, dgrad, fprop, keep_decoded, wgrad
from megafp8.numerics.granular import block_amax, quantize_blocks, quantize_tensor
from megafp8.numerics.payload import decode_row, encode_rows, sum_rows
from megafp8.numerics.probe import missing_product
from megafp8.numerics.products import cpu_products, linear, matmul, product_dtype
from megafp8.numerics.quantize import QuantizedTensor, compute_amax, decode, quantize
from megafp8.numerics.recipe import CORE_ROLES, ROLES, Recipe, Role
from megafp8.numerics.registry import CastObserver, ScaleRegistry

__all__ = [
    "E4M3",
    "E5M2",
    "CORE_ROLES",
    "CastObserver",
    "ROLES",
    "Fp8Format",
    "QuantizedTensor",
    "Recipe",
    "Role",
    "ScaleRegistry",
    "block_amax",
    "check_gemm_dims",
    "compute_amax",
    "cpu_products",
    "decode",
    "decode_row",
    "dgrad",
    "encode_rows",
    "fp8_hardware",
    "fprop",
    "keep_decoded",
    "linear",
    "matmul",
    "missing_product",
    "product_dtype",
    "quantize",
    "quantize_blocks",
    "quantize_tensor",
    "recipe_hardware",
    "sum_rows",
    "wgrad",
    "writes_fp32",
]
