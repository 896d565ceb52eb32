-- Points trajectories to the copies of their records (an Arrow table `moved`, with the columns record and copy).
UPDATE trajectories
SET record = moved.copy
FROM moved
WHERE trajectories.record = moved.record;
