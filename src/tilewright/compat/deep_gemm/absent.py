"""Names of DeepGEMM that are not here, and why: the text of `__getattr__` of each module."""

from collections.abc import Sequence

_LATER = "comes with a later version"
_LOGITS = f"an index logit of sparse attention: it {_LATER}"
_HYPER = f"a hyperconnection kernel: it {_LATER}"
_FP4 = "a product of FP4, which Hopper's tensor cores do not have: DeepGEMM has it for Blackwell"
_MEGA = "one kernel of a whole layer of experts over NVLink: DeepGEMM has it for Blackwell"
_NEWER = "DeepGEMM has it since a release after 2.6.1, whose names these are"

_WHY = {
    "fp8_mqa_logits": _LOGITS,
    "fp8_fp4_mqa_logits": _LOGITS,
    "get_paged_mqa_logits_metadata": _LOGITS,
    "fp8_paged_mqa_logits": _LOGITS,
    "fp8_fp4_paged_mqa_logits": _LOGITS,
    "tf32_hc_prenorm_gemm": _HYPER,
    "fp4_gemm_nt": _FP4,
    "m_grouped_fp4_gemm_nt_contiguous": _FP4,
    "m_grouped_fp4_gemm_nt_masked": _FP4,
    "k_grouped_fp4_gemm_nt_contiguous": _FP4,
    "cublaslt_nvfp4_gemm_nt": _FP4,
    "SymmBuffer": _MEGA,
    "get_symm_buffer_for_mega_moe": _MEGA,
    "transform_weights_for_mega_moe": _MEGA,
    "fp8_fp4_mega_moe": _MEGA,
    "bf16_mega_moe": _MEGA,
    "use_deterministic_algorithms": _NEWER,
    "batched_syrk": _NEWER,
    "batched_symm": _NEWER,
}


def missing(module: str, name: str, names: Sequence[str]) -> AttributeError:
    """The error for `name`, which `module` lacks: the reason if known, and the names that it has."""
    why = f": {_WHY[name]}" if name in _WHY else ""
    return AttributeError(f"{module} has no {name!r}{why}. It has: {', '.join(names)}.")
