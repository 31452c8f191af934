"""What the parameters would run, for which tables and figures of the paper, and what it costs. Nothing is started."""

KNOWN_GB = {"imagenet": 150, "coco": 20, "ade20k": 1}  # size of each kind of data set, unpacked and without the archives
