"""Options of `aitrain chat`."""

from aitrain.options.environment import EnvironmentOptions
from aitrain.options.generation import GenerationOptions


class ChatConfig(EnvironmentOptions, GenerationOptions):
    """The options of a run that a chat may change: the environment of its cases, and how answers are sampled."""
