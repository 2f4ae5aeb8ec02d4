"""Which part of the model runs in which precision, and the record of it. Imports no torch."""

from megafp8.precision.audit_log import AUDIT_NAME, AuditLog
from megafp8.precision.manifest import build_manifest, write_manifest
from megafp8.precision.plan import LinearPlan, Precision, PrecisionPlan, build_plan
from megafp8.precision.recipe import high_precision_wgrad, recipe_fields, recipe_from_config

__all__ = [
    "AUDIT_NAME",
    "AuditLog",
    "LinearPlan",
    "Precision",
    "PrecisionPlan",
    "build_manifest",
    "build_plan",
    "high_precision_wgrad",
    "recipe_fields",
    "recipe_from_config",
    "write_manifest",
]
