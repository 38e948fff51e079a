"""Charts and drawings: one meaning for each colour (:mod:`.palette`), Matplotlib's style and files (:mod:`.style`),
charts that several packages use (:mod:`.charts`), and drawings in SVG: :mod:`.canvas`, :mod:`.parts`, and
:mod:`.player` for several frames.
"""
