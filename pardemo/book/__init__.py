"""The book: a package for each chapter (:mod:`.chapters`), what pages share (:mod:`.page`), and its runs (:mod:`.run`).

Nothing of it is needed to use the engines.
"""
