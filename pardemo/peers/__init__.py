"""The frameworks to compare with, a room each, and what starts their processes (:mod:`.launchers`)."""
