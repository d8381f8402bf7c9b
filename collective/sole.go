package collective

// A blocking collective that is the only call in progress, as in a loop of them, begins by one compare-and-swap of
// [communicator.sole] and ends by another. Everything else takes the lock (lock, unlock), which first takes the state
// out of that word: from then on the two compare-and-swaps fail, and such a call takes the lock too. unlock puts the
// state back once it fits into the word.
//
// The word is the turn, times 4, plus soleRuns if the call of that turn is in progress. With soleLocked in it, the rest
// of it is invalid, and the fields that mu guards are valid.
const (
	soleRuns   = 1
	soleLocked = 2
	soleTurn   = 4
)

// lock locks mu, which guards the fields that follow it, and makes them valid.
func (c *communicator) lock() {
	c.mu.Lock()
	word := c.sole.Or(soleLocked)
	if word&soleLocked != 0 {
		return
	}
	runs := word&soleRuns != 0
	c.turn = word / soleTurn
	c.next, c.doing, c.blocked, c.direct = c.turn, c.turn, runs, true
	if runs {
		c.next++
	}
	c.numbers.SetCollectives(c.next + c.ahead.Load())
}

// unlock unlocks mu, and puts the state back into the word if it fits: no call is in progress, or only a Do that may
// run.
func (c *communicator) unlock() {
	idle := c.next == c.turn && !c.blocked
	runs := c.next == c.turn+1 && c.blocked && c.direct && c.doing == c.turn
	if (idle || runs) && !c.closing && len(c.queue) == 0 {
		c.ahead.Store(c.numbers.Of(0, 0) - c.next)
		word := c.turn * soleTurn
		if runs {
			word |= soleRuns
		}
		c.sole.Store(word)
	}
	c.mu.Unlock()
}

// enterSole begins a blocking collective if no other call is in progress. It returns false if the lock is needed.
func (c *communicator) enterSole() (t ticket, ok bool) {
	word := c.sole.Load()
	if word&(soleRuns|soleLocked) != 0 || !c.sole.CompareAndSwap(word, word|soleRuns) {
		return t, false
	}
	turn := word / soleTurn
	return ticket{turn: turn, seq: turn + c.ahead.Load()}, true // ahead changes only while no such call is in progress
}

// finishSole ends the call of a turn, which [communicator.enterSole] may have begun. It returns false if the lock is
// needed.
func (c *communicator) finishSole(turn uint64) bool {
	return c.sole.CompareAndSwap(turn*soleTurn|soleRuns, (turn+1)*soleTurn)
}

// counts returns how many calls have begun, and how many of them have ended.
func (c *communicator) counts() (begun, over uint64) {
	if word := c.sole.Load(); word&soleLocked == 0 {
		return word/soleTurn + word&soleRuns, word / soleTurn
	}
	c.lock()
	defer c.unlock()
	return c.next, c.turn
}
