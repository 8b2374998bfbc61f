"""Heads: small networks that draft from the target's hidden states."""

from .dflash import DFlashHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .files import (
    load_dflash,
    load_draft_model,
    load_eagle,
    load_eagle3,
    load_medusa,
    load_mtp,
    load_peagle,
    save_head,
)
from .layers import FeatureHead, Shared
from .medusa import MedusaHeads
from .mtp import MtpHead
from .mtp_layers import MtpLayer, load_mtp_layers
from .peagle import PEagleHead

__all__ = [
    "DFlashHead",
    "Eagle3Head",
    "EagleHead",
    "FeatureHead",
    "MedusaHeads",
    "MtpHead",
    "MtpLayer",
    "PEagleHead",
    "Shared",
    "load_dflash",
    "load_draft_model",
    "load_eagle",
    "load_eagle3",
    "load_medusa",
    "load_mtp",
    "load_mtp_layers",
    "load_peagle",
    "save_head",
]
