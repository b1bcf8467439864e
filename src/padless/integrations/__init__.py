"""Trainers and frameworks that padless plugs into; each submodule needs its own extra.

Importing this package loads none of them: ``from padless.integrations.transformers import with_padless``.
"""

__all__ = ["lightning", "ray", "transformers", "trl", "verl"]
