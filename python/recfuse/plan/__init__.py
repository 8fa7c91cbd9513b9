"""The results of tuning, as small readable files."""

from recfuse.plan.collection import CollectionPlan
from recfuse.plan.table import Plan

__all__ = ["CollectionPlan", "Plan"]
