"""Settings of every test run: one torch thread (bits do not depend on it, times do), no clock for hypothesis."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("minitransformer", deadline=None, max_examples=20)
settings.load_profile("minitransformer")
