"""A solution to each exercise of this chapter, as it would stand in the notebook."""


def my_own(bars):
    own, open_bars = [end - begin for begin, end in bars], []  # numbers of bars that are not over
    for number, (begin, end) in enumerate(bars):
        while open_bars and bars[open_bars[-1]][1] <= begin:
            open_bars.pop()
        if open_bars:
            own[open_bars[-1]] -= end - begin
        open_bars.append(number)
    return own


def my_exposed(communication, computation):
    def together(bars):
        total, last = 0.0, float("-inf")
        for begin, end in sorted(bars):
            total += max(0.0, end - max(begin, last))
            last = max(last, end)
        return total

    # what the union has beyond the computation is communication alone
    return together([*communication, *computation]) - together(computation)
