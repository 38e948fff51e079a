"""The fine-tune of section 6: recipes, training, prediction and scores."""
