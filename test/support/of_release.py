"""What differs between the releases of the engine under test."""

from pd_harness.releases import release

IS_LATER = release() != "0.5.9"  # from 0.5.20 on
OUR_FRAMES = 1 if IS_LATER else 2  # of a registration, the last ones
