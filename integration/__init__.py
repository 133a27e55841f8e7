"""Adapters that hand a serving engine's calls to the public functions of `kernels`.

The arrow points one way: integration imports kernels, nothing imports integration.
"""
