"""The public names, for type checkers; see __init__.py."""

from aitrain import judges as judges
from aitrain.environment.completion_parser import ToolCall as ToolCall
from aitrain.environment.contract import Score as Score
from aitrain.environment.contract import ToolResult as ToolResult
from aitrain.environment.requirements import EnvRequirements as EnvRequirements
from aitrain.errors import AitrainError as AitrainError
from aitrain.errors import ConfigError as ConfigError
from aitrain.errors import EnvironmentFailed as EnvironmentFailed
from aitrain.errors import EpisodeTruncated as EpisodeTruncated
from aitrain.errors import Interrupted as Interrupted
from aitrain.errors import RunFailed as RunFailed
from aitrain.notebook import chat as chat
from aitrain.notebook import compare as compare
from aitrain.notebook import train as train
from aitrain.options.train import TrainConfig as TrainConfig
from aitrain.runs.result import Result as Result

__version__: str
