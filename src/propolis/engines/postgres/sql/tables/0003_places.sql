-- Places say what was counted before the clock went back.

-- Which place was the last one, when somebody who sweeps last came.
ALTER TABLE sweeper ADD COLUMN seen_pos bigint NOT NULL DEFAULT 0;
-- Whatever has a place up to this one was counted before the clock went back.
ALTER TABLE watch ADD COLUMN stepped_pos bigint;
