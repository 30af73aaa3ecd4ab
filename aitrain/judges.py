"""Judges for the answers of a model: rules by name, models that judge by a rubric or rank, and your own.

judges.load(["gsm8k", {"judge": "my_judges.py:short", "weight": 0.2}])
"""

from aitrain.environment.judges.judge_set import Judge, Judges, load
from aitrain.environment.judges.model_judge import RemoteJudge
from aitrain.environment.judges.ranking import Ranking
from aitrain.environment.judges.rubric import Rubric
from aitrain.environment.judges.rules import boxed, exact, gsm8k, math

__all__ = ["Judge", "Judges", "Ranking", "RemoteJudge", "Rubric", "boxed", "exact", "gsm8k", "load", "math"]
