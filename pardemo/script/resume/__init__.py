"""A script that is stopped and resumed: does it go on as if nothing had happened, and if not, what is lost?"""
