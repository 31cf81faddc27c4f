"""The external model package that SGLang imports; qwen3_moe.py holds the class that replaces SGLang's own.

SGLang only logs a submodule or a plugin that fails, and would serve its own model then. An error in here ends the
process instead: SGLang does not catch it. So everything that could fail in silence is tried here.
"""

from minitransformer.plugins.sglang.plugin import require_installed

require_installed()

from minitransformer.plugins.sglang.models import qwen3_moe  # noqa: E402, F401
