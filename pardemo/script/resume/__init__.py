"""A script that is stopped and resumed: does it go on as if nothing had happened, and if not, what is lost?"""

#: Seconds that ranks have to end by themselves after SIGTERM, before they are killed.
GRACE_S = 10.0
#: Steps of the undisturbed run, where nobody says how many.
STEPS = 8
