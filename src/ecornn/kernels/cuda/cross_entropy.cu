// The gradient of cross entropy where nothing but the scores was kept; it may take their place.
//
// A block makes a row. Every entry is what torch's kernels make of it one after the other, to the
// bit: the log-softmax, rounded, and from it the gradient, where all that arrives is one entry.
constexpr int THREADS = 256;

struct CrossEntropyArguments {
  const float* scores;      // (rows, classes)
  float* grads;             // the same memory, or other
  const long long* target;  // (rows)
  const float* largest;     // (rows), of the scores
  const float* log_sum;     // (rows), of the exponentials of what each is below that
  const float* slope;       // (rows), what arrives at the log-softmax of the target
  int rows, classes;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(const __grid_constant__ CrossEntropyArguments a) {
  const size_t row = blockIdx.x, begin = row * a.classes;
  const float* scores = a.scores + begin;
  float* grads = a.grads + begin;
  const float largest = a.largest[row], log_sum = a.log_sum[row], slope = a.slope[row];
  const long long target = a.target[row];
  const auto gradient = [&](float score, int v) {
    const float log_softmax = score - largest - log_sum;
    return fmaf(-expf(log_softmax), slope, v == target ? slope : 0.0f);
  };
  // four at once between the first and the last multiple of 16 bytes, if both have the same ones
  const size_t place = reinterpret_cast<size_t>(scores);
  const bool alike = (place ^ reinterpret_cast<size_t>(grads)) % 16 == 0;
  const int head = alike ? min(a.classes, int(-(place / 4) % 4)) : a.classes;
  const int fours = (a.classes - head) / 4, tail = head + 4 * fours;
  for (int v = threadIdx.x; v < head; v += THREADS) grads[v] = gradient(scores[v], v);
  for (int i = threadIdx.x; i < fours; i += THREADS) {
    float4 x = reinterpret_cast<const float4*>(scores + head)[i];
    const int v = head + 4 * i;
    x.x = gradient(x.x, v), x.y = gradient(x.y, v + 1);
    x.z = gradient(x.z, v + 2), x.w = gradient(x.w, v + 3);
    reinterpret_cast<float4*>(grads + head)[i] = x;
  }
  for (int v = tail + threadIdx.x; v < a.classes; v += THREADS) grads[v] = gradient(scores[v], v);
}
