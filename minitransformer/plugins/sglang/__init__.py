"""SGLang as the sampler: its scheduler, its K/V pool and its server; our model, our log-probs, our sampling.

    SGLANG_EXTERNAL_MODEL_PACKAGE=minitransformer.plugins.sglang.models

makes it so; without that variable an installed plugin does nothing. docs/sglang.md shows the commands.
This package only translates: batch.py SGLang's batch into ours, logits.py our log-probs and tokens into SGLang's
fields, loading.py checkpoint tensors into our parameters. It imports SGLang and torch only when SGLang runs.
"""

MODEL_PACKAGE = "minitransformer.plugins.sglang.models"
MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
# Set to 1 to run a version of SGLang that the laws were not tested with.
ANY_VERSION_VARIABLE = "MINITRANSFORMER_SGLANG_ANY_VERSION"
TESTED_VERSION = "0.5.17"
