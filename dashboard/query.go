package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Query reads the state of a job from the server of its page.
type Query struct {
	client     *http.Client
	url, token string

	// The last point that was read, and its series: a table needs no points, and the job pays for each.
	after, series int64
}

// NewQuery returns a query of the JSON at a server's URL. The token may be "".
func NewQuery(url, token string) *Query {
	return &Query{client: http.DefaultClient, url: url, token: token}
}

// URL returns the address of the JSON. The host of a job of this host is not looked up.
func (q *Query) URL() string { return q.url }

const (
	queryBytesMax = 64 << 20 // of an answer
	queryTimeMax  = 10 * time.Second
)

// Read returns the state of the job, and its JSON. Unless all points are wanted, it has those since the last call. The
// error can have any text that the server sends.
func (q *Query) Read(ctx context.Context, all bool) (m Message, text []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeMax)
	defer cancel()
	target := q.url
	if !all {
		target += fmt.Sprintf("?after=%d&series=%d", q.after, q.series)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return m, nil, err
	}
	if q.token != "" {
		r.Header.Set("Authorization", "Bearer "+q.token)
	}
	answer, err := q.client.Do(r)
	if err != nil {
		return m, nil, fmt.Errorf("reaching the job: %w", err)
	}
	defer answer.Body.Close()
	if text, err = io.ReadAll(io.LimitReader(answer.Body, queryBytesMax)); err != nil {
		return m, nil, fmt.Errorf("reading the job's answer: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return m, nil, fmt.Errorf("%s answers %s: %s", q.url, answer.Status,
			strings.TrimSpace(string(text[:min(len(text), 300)])))
	}
	if err := json.Unmarshal(text, &m); err != nil || m.Job.Version != 1 {
		return m, nil, errors.Join(fmt.Errorf("%s is not the dashboard of a job, or of another version", q.url), err)
	}
	if q.series = m.Series; len(m.Points) > 0 {
		q.after = m.Points[len(m.Points)-1].Step
	}
	return m, text, nil
}
