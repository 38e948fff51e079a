"""The collection of notebooks: running it (:mod:`.runner`, :mod:`.report`, :mod:`.reference`), and what its cells use.

Cells on ranks (:mod:`.cells`), guesses and exercises, figures of what was measured and drawings of what is cut, sizes
and parameters (:mod:`.presets`, :mod:`.parameters`). Nothing of it is needed to use the engines.
"""
