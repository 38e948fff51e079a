"""Recipes: a fine-tune as one YAML file. What it may say (:mod:`.recipe_schema`), reading and checking it
(:mod:`.recipe`), what it needs on this machine (:mod:`.needs`); the project's own recipes lie here."""
