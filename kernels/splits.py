"""Into how many splits rows are cut, so that their programs fill the device.

Nothing here imports Triton.
"""

from collections.abc import Mapping

from flexdecode.kernels.hardware import Device
from flexdecode.kernels.sizes import ceil_div

MAX_SPLITS = 1024
WHOLE_KEYS = 512  # rows up to which a reduction costs more than a split saves
FEW_ROWS = 16  # times the rows: so many processors need no more than an item each
MIN_UNITS = 4  # steps of the loop that are worth an item, where a processor gets several
MIN_SHARE = 2  # steps of the loop that are worth a split of their own
SHORT_SHARE = 16  # steps up to which all have their bounds checked if the last one has to
MIN_FILL_GAIN = 0.03  # of the device, that is worth more programs than processors
FEW_SPLITS = 16  # partial results that the reduction takes at a time where there are no more


def choose_splits(
    programs: int,
    units: int,
    steps: int,
    keys: int,
    device: Device,
    options: Mapping[str, int],
    waves: bool,
) -> int:
    """Share each tile's units among enough programs to fill the device, and no more.

    At most so many programs as there are processors, or, with `waves`, more of them where those
    would leave too many processors without work. Shares are whole blocks of so many `steps`, as
    `share_of` in worklist.py makes them: no program is left without one.

    Parameters
    ----------
    programs : int
        That one split of each row makes.
    units, keys : int
        Steps of the loop over the longest row, and its keys.
    steps : int
        Of a block of the tables; 1 without tables.
    device : Device
    options : mapping of str to int
        ``num_splits`` is taken as it is.
    waves : bool
        Whether `fill_of` holds: tiles of 16 rows over keys and values that are not quantised.

    Returns
    -------
    int
        From 1 to `MAX_SPLITS`.
    """
    if "num_splits" in options:
        return options["num_splits"]
    if programs == 0 or keys <= WHOLE_KEYS:
        return 1
    splits = 1
    if fill_of(programs, device.processors) < 1:
        splits = max(1, min(device.processors // programs, MAX_SPLITS))
    splits, score = _shared(splits, programs, units, steps, device)
    if waves:
        most = min(units // SHORT_SHARE * 2, FEW_SPLITS, 16 * device.processors // programs)
        others = [
            _shared(more, programs, units, steps, device) for more in range(splits + 1, most + 1)
        ]
        best = max((better for _, better in others), default=score)
        if best > score + MIN_FILL_GAIN:
            return next(found for found, other in others if other > best - MIN_FILL_GAIN / 3)
    return splits


def _shared(
    splits: int, programs: int, units: int, steps: int, device: Device
) -> tuple[int, float]:
    """Splits that have work if there are so many, and the part of the device that they keep busy.

    A split costs a start of a program and its place in the reduction, measured on an H200.
    """
    share = max(ceil_div(units, splits), MIN_SHARE)
    if share > 2 * steps:
        share = ceil_div(share, steps) * steps
    splits = ceil_div(units, share)
    score = fill_of(programs * splits, device.processors) * units / (share * splits)
    if splits > 1:
        score -= 0.03 + 0.3 / share + 0.0025 * programs * splits / device.processors
    return splits, score


def fill_of(programs: int, processors: int) -> float:
    """Part of the time that so many equal programs keep a device busy, two on a processor.

    Programs on three quarters of the processors read as fast as the memory can, and one of them as
    fast as two on the same processor, so that a last wave of half as many as there is room for is
    as good as a full one. Those of a first wave end at about the same time, and where some
    processors have two of them and others one, nothing makes up for it. A small last wave does not
    start all at once. The numbers are a fit to times on an H200.

    Parameters
    ----------
    programs, processors : int

    Returns
    -------
    float
        At most 1.
    """
    if programs <= processors:
        return min(4 * programs / (3 * processors), 1.0)
    waves = programs / (2 * processors)
    if waves <= 1:
        return waves
    last = waves % 1
    return waves / (waves // 1 + max(last, (1 + 1.8 * last) / 3 if last else 0.0))


def fair_items(rows: int, slots: int) -> int:
    """Return the items that a balanced launch cuts all work into.

    Two for each of the `slots` of the device fill it once, where two programs fit on a processor.
    Where rows are many, and some have to wait anyhow, three let short ones fill the gaps. Each of
    the `rows` may have one more, a short last one. Where they are few beside the slots the shares
    grow a little for those, so that no program has to wait for a place.
    """
    items = slots if are_few(rows, slots) else slots + min(max(rows, slots), 2 * slots)
    return items - rows if rows * 4 <= items else items


def are_few(rows: int, slots: int) -> bool:
    """True where one item for each place on the device is fair enough.

    Two would now and then meet on one processor and leave another without any.
    """
    return rows * FEW_ROWS <= slots
