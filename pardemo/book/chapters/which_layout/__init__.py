"""Chapter *Which layout?*: what its page draws, measures, asks and claims."""
