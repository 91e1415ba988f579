"""The rows."""

from tests.scenarios.rows_agents import AGENT_ROWS
from tests.scenarios.rows_conditions import CONDITION_ROWS
from tests.scenarios.rows_decode import DECODE_ROWS
from tests.scenarios.rows_paused import PAUSED_ROWS
from tests.scenarios.rows_prefill import PREFILL_ROWS
from tests.scenarios.rows_requests import REQUEST_ROWS
from tests.scenarios.rows_stages import STAGE_ROWS

ROWS = [
    *PREFILL_ROWS,
    *DECODE_ROWS,
    *PAUSED_ROWS,
    *AGENT_ROWS,
    *CONDITION_ROWS,
    *REQUEST_ROWS,
    *STAGE_ROWS,
]
