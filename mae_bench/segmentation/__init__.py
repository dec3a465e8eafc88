"""Semantic segmentation: mmsegmentation's UperNet on our encoder. The pipeline is ``mae_bench.segmentation.run``."""

import contextlib
import io
import warnings

# What mmseg and mmcv say on import, of optional parts that nothing here uses (OneDL, deformable attention), is noise.
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformableAttention``", category=UserWarning)
    import mmseg.datasets
    import mmseg.models  # noqa: F401
