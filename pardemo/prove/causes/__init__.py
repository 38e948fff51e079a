"""Why two layouts part: each cause a small class that looks at what was recorded, and says so or says nothing."""

from pardemo.prove.causes.begins import begin
from pardemo.prove.causes.judge import findings, of_updates, printed

__all__ = ["begin", "findings", "of_updates", "printed"]
