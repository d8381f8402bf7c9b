package worker

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/private"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// nodes returns the workers of each node, ascending, in the order of their first workers. The workers of a node are on
// one host and share this user's folder; a worker without that folder is a node by itself.
func (w *Worker) nodes() [][]int {
	var out [][]int
	at := map[string]int{}
	for i := range w.members {
		id := fmt.Sprint(i)
		if i < len(w.registrations) {
			id = nodeOf(&w.registrations[i], id)
		}
		if _, known := at[id]; !known {
			at[id] = len(out)
			out = append(out, nil)
		}
		out[at[id]] = append(out[at[id]], i)
	}
	return out
}

// nodeOf identifies a worker's node.
func nodeOf(c *rendezvous.Registration, alone string) string {
	var a info
	if json.Unmarshal(c.Data, &a) != nil || a.HostID == "" || a.Folder == "" {
		return alone
	}
	return a.HostID + " " + a.Folder + " " + a.Apart
}

// folderID identifies the folder that the workers of a node share; "": there is none.
func folderID() string {
	folder, err := private.Folder()
	if err != nil {
		return ""
	}
	id, err := private.ID(folder)
	if err != nil {
		return ""
	}
	return id
}

const (
	nodeFilePrefix = "alive-"
	nodeFileOld    = 24 * time.Hour // files of workers that were killed while they joined
)

// nodeFile opens the file of this worker's node.
func (w *Worker) nodeFile(nodes [][]int) (*membership.NodeFile, error) {
	var mine []int
	for _, workers := range nodes {
		for _, i := range workers {
			if i == w.job.Worker {
				mine = workers
			}
		}
	}
	if len(mine) == 1 {
		return membership.NewMemoryFile(1), nil
	}
	folder, err := private.Folder()
	if err != nil {
		return nil, fmt.Errorf("the folder in which the workers of this host exchange heartbeats: %w", err)
	}
	if w.job.Worker == mine[0] {
		removeOld(folder)
	}
	first := &w.registrations[mine[0]]
	sum := sha256.Sum256([]byte(strings.Join([]string{first.Job, fmt.Sprint(first.Epoch), first.Nonce}, "\n")))
	return membership.OpenNodeFile(filepath.Join(folder, nodeFilePrefix+hex.EncodeToString(sum[:12])), len(mine))
}

// removeOld removes the files that killed workers left.
func removeOld(folder string) {
	entries, _ := os.ReadDir(folder) // nothing to remove, or the next call fails too
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), nodeFilePrefix) && time.Since(info.ModTime()) > nodeFileOld {
			os.Remove(filepath.Join(folder, e.Name()))
		}
	}
}
