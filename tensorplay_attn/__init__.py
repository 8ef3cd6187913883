"""The surface of `tensorplay.nn.attention` on PyTorch tensors."""
__version__ = "0.1.0"

from tensorplay_attn import functional
from tensorplay_attn.block_mask import BlockMask, create_block_mask
from tensorplay_attn.functional import AuxOutput, AuxRequest
from tensorplay_attn.masks import and_masks, create_mask, noop_mask, or_masks
from tensorplay_attn.omni_attention import omni_attention
from tensorplay_attn.routing import (SDPAParams, SDPBackend, can_use_cudnn_attention, can_use_efficient_attention, can_use_flash_attention,
                                     explain_routing, sdpa_kernel)

WARN_FOR_UNFUSED_KERNELS = False  # True: a call that cannot run fused warns each reason

__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "SDPAParams", "SDPBackend", "WARN_FOR_UNFUSED_KERNELS", "and_masks", "can_use_cudnn_attention",
           "can_use_efficient_attention", "can_use_flash_attention", "create_block_mask", "create_mask", "explain_routing", "functional", "noop_mask",
           "omni_attention", "or_masks", "sdpa_kernel"]
