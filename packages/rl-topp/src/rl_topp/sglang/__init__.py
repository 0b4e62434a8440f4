"""The SGLang plugin: what makes a server return the nucleus of every token it samples.

`plugin` is what SGLang loads, `hooks` what runs inside it, `draw` (CPU) and `kernels` (CUDA) the
arithmetic, `step` the way from the device to the reply, `check` the report of `rl-topp
sglang-check`. `keys` names what travels in requests and replies. Nothing is imported here: SGLang
loads the plugin in processes that never sample.
"""
