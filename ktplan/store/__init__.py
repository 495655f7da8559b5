"""The expert store on disk: layout of bytes, manifest, reading and writing."""

from __future__ import annotations

from ktplan.store.layout import AMX_INT4, AMX_INT8, LAYOUTS, Layout, legal_parts, pack, packed_bytes, unpack
from ktplan.store.manifest import StoreFile, StoreManifest, StoreShape, WeightError
from ktplan.store.store import ExpertStore, PackedArrays

__all__ = [
    "AMX_INT4",
    "AMX_INT8",
    "LAYOUTS",
    "ExpertStore",
    "Layout",
    "PackedArrays",
    "StoreFile",
    "StoreManifest",
    "StoreShape",
    "WeightError",
    "legal_parts",
    "pack",
    "packed_bytes",
    "unpack",
]
