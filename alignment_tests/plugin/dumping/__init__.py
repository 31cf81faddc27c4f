"""SGLang's own Qwen3-MoE with hooks that write what each module returns; for SGLANG_EXTERNAL_MODEL_PACKAGE."""
