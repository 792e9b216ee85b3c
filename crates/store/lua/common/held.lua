-- held: the slots that a pool holds for its outstanding dials, and learned answer rates. `fleet::outbound` computes the
-- same numbers: integers, and operations on doubles that both languages round alike, in the same order.

local PROBABILITY_UNIT, SUMMED_VARIANCE, MAX_TERMS = RULES.PROBABILITY_UNIT, RULES.SUMMED_VARIANCE, RULES.MAX_TERMS

-- Returns the smallest k with P(X > k) <= target, where P(j + 1) / P(j) = (a - b * j) / (j + 1). With b = 0 that is the
-- Poisson distribution of mean a, otherwise a binomial one.
local function summed_bound(mode, a, b, target)
  local negligible = target * 0.0001
  local above, term, at = 0, 1, mode
  for _ = 1, MAX_TERMS do
    term = term * (a - b * at) / (at + 1)
    if term < negligible then break end
    above = above + term
    at = at + 1
  end
  local below = 0
  term, at = 1, mode
  for _ = 1, MAX_TERMS do
    if at < 1 then break end
    term = term * at / (a - b * (at - 1))
    if term < negligible then break end
    below = below + term
    at = at - 1
  end
  local allowed = target * (below + 1 + above)
  term, at = 1, mode
  for _ = 1, MAX_TERMS do
    if above <= allowed then break end
    term = term * (a - b * at) / (at + 1)
    above = above - term
    at = at + 1
  end
  return at
end

-- The same from the normal distribution, with the corrections for skewness and for whole numbers.
local function normal_bound(mean, variance, skewness, target)
  local row = 2
  while RULES.NORMAL_QUANTILES[row][1] < target do row = row + 1 end
  local low, high = RULES.NORMAL_QUANTILES[row - 1], RULES.NORMAL_QUANTILES[row]
  local z = low[2] + (target - low[1]) * (high[2] - low[2]) / (high[1] - low[1])
  local slots = mean + z * math.sqrt(variance) + (z * z - 1) * skewness / 6 - 0.5
  return -math.floor(-slots)
end

-- Returns the slots to hold: the smallest k such that more than k dials are answered with a probability of at most
-- `target`. The sums are those of the outstanding dials: their number, p in units of 1/1024, and p (1 - p) in units of
-- 1/1024^2.
local function held_slots(dials, probability, variance, target)
  if target < RULES.MIN_MISS_TARGET then return dials end
  if variance == 0 then return math.floor(probability / PROBABILITY_UNIT) end
  target = math.min(target, RULES.MAX_MISS_TARGET)
  local mean = probability / PROBABILITY_UNIT
  variance = variance / (PROBABILITY_UNIT * PROBABILITY_UNIT)

  local p = mean / dials
  local q = 1 - p
  local equal_variance = mean * q
  local slots
  if equal_variance > SUMMED_VARIANCE then
    slots = normal_bound(mean, equal_variance, q - p, target)
  else
    local odds = p / q
    slots = summed_bound(math.floor((dials + 1) * p), dials * odds, odds, target)
  end
  if variance < equal_variance and target <= RULES.MAX_TRANSLATED_TARGET then
    local bound
    if variance > SUMMED_VARIANCE then
      bound = normal_bound(mean, variance, 1, target)
    else
      local shift = math.floor(mean - variance)
      local rest = mean - shift
      bound = shift + summed_bound(math.floor(rest), rest, 0, target)
    end
    slots = math.min(slots, bound)
  end
  return math.min(slots, dials)
end

local DIAL_WEIGHT = RULES.DIAL_WEIGHT

-- Returns the counts of a merchant without ended dials: dials and answers, in units of 1/65,536.
local function first_answer_rate()
  return RULES.ANSWER_PRIOR * DIAL_WEIGHT, RULES.ANSWER_PRIOR * DIAL_WEIGHT
end

-- Records that a dial ended; its pool still has `outstanding` dials. Returns the counts after it.
local function record_dial_ended(dials, answers, answered, outstanding)
  local memory = RULES.ANSWER_MEMORY + RULES.ANSWER_MEMORY_PER_DIAL * outstanding
  dials = dials - math.floor(dials / memory) + DIAL_WEIGHT
  answers = answers - math.floor(answers / memory) + (answered and DIAL_WEIGHT or 0)
  return dials, math.min(answers, dials)
end

-- Returns the answer probability to plan with, in units of 1/1024: the upper end of the Wilson interval. Of the
-- `outstanding` dials of the pool, those beyond the number of ended ones count as answered.
local function answer_probability(dials, answers, outstanding)
  local unproven = math.max(0, outstanding * DIAL_WEIGHT - dials)
  dials, answers = (dials + unproven) / DIAL_WEIGHT, (answers + unproven) / DIAL_WEIGHT
  local z, square = RULES.ANSWER_DEVIATIONS, RULES.ANSWER_DEVIATIONS * RULES.ANSWER_DEVIATIONS
  local spread = z * math.sqrt(answers * (dials - answers) / dials + square / 4)
  local upper = (answers + square / 2 + spread) / (dials + square)
  return math.max(RULES.MIN_ANSWER_PROBABILITY, math.min(-math.floor(-upper * PROBABILITY_UNIT), PROBABILITY_UNIT))
end
