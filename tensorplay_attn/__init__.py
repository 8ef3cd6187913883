"""The surface of `tensorplay.nn.attention` on PyTorch tensors."""
__version__ = "0.1.0"

from tensorplay_attn import bias, externalize, functional, sdpa, varlen
from tensorplay_attn.block_mask import BlockMask, create_block_mask
from tensorplay_attn.functional import AuxOutput, AuxRequest
from tensorplay_attn.masks import and_masks, create_mask, noop_mask, or_masks
from tensorplay_attn.omni_attention import omni_attention
from tensorplay_attn.registry import (FlashHandle, activate_flash_attention_impl, current_flash_attention_impl, flash_kernel,
                                      list_flash_attention_impls, register_flash_attention_impl, restore_flash_attention_impl)
from tensorplay_attn.routing import (SDPAParams, SDPBackend, can_use_cudnn_attention, can_use_efficient_attention, can_use_flash_attention,
                                     explain_routing, sdpa_kernel)

WARN_FOR_UNFUSED_KERNELS = False  # True: a call that cannot run fused warns each reason

__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "FlashHandle", "SDPAParams", "SDPBackend", "WARN_FOR_UNFUSED_KERNELS",
           "activate_flash_attention_impl", "and_masks", "bias", "can_use_cudnn_attention", "can_use_efficient_attention",
           "can_use_flash_attention", "create_block_mask", "create_mask", "current_flash_attention_impl", "explain_routing", "externalize",
           "flash_kernel", "functional", "list_flash_attention_impls", "noop_mask", "omni_attention", "or_masks",
           "register_flash_attention_impl", "restore_flash_attention_impl", "sdpa", "sdpa_kernel", "varlen"]
